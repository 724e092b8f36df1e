"""What XLA writes: profiles (XSpace) and compiled modules (HloModuleProto), read without protobuf."""
