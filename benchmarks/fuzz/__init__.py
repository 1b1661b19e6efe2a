"""The project's fuzzer: archives, inputs and decoders under attack (`python -m benchmarks.fuzz`).

A *target* (`target`) makes inputs and reads them; a *campaign* (`campaign`) runs cases of many targets in
worker processes and counts what they come to; what one input comes to is judged in `judging`. A case
depends on the target, the seed of the campaign and its number alone, so it can be replayed by them.
"""
