"""The byte ranges of files that each process reads for a transfer, and the reads into host memory."""
