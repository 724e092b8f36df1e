"""What the kernel lets a process still take: memory, address space, threads, and whether it lets it run at all."""
