"""Captured graphs: the plan of a graph's inputs, stable buffers, capture, replay."""
