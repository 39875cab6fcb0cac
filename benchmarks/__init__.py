"""Timings beside peers: two things in one process, interleaved, as ratios of medians. Never asserted in the tests."""
