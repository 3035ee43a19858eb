"""The local adapter: workers are processes of this machine, below shims, started by the zygote."""
