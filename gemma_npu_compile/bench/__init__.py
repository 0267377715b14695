"""``gemma-npu bench``: the step against its peers, against the memory it has to read, and against a target table.

scenarios.py says what is run, work.py what a round of it is, peers.py who runs it, measure.py how it is timed and
compared, costs.py what a step has to read and compute, machine.py what this machine can do, estimate.py what another
one would take, targets.py what is asked.
"""
