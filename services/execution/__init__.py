"""Makes live members equal what is granted; the training group of each generation; all clocks on workers.

Consumes: job (submitted, ended), allocation (granted, resized, evicted, closed).
Publishes: worker.*, capacity.observed.
Owns: execution.jobs, members, generations, checkpoints, capacity.
"""
