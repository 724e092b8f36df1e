"""Parts of the kubelet's own interfaces, generated from what is written down here."""
