"""What measures the chip that is here, or tunes kernels with its compiler; the processes of studies and of the lab."""
