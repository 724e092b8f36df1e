"""Parts of the kubelet's own interfaces, generated from the .proto files here."""
