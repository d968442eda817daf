"""What a model takes along from the run that made it.

facts      what a run's verified statements say, summed up
documents  SLSA's provenance, a bill of materials, a model card
write      all of them, and OpenSSF model signing (extra `model-signing`), beside the model
"""
