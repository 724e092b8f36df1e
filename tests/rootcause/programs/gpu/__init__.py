"""The training programs for a GPU. Each has `main(planted, device)`; on the device "cpu" their sizes are small."""
