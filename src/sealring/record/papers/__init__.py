"""What a model takes along from the run that made it.

facts   what a run's verified statements say, summed up
slsa    SLSA's provenance, for tools that know nothing of sealring
card    a model card
bom     a bill of materials (CycloneDX, with a model card of its own)
bundle  OpenSSF model signing; needs the extra `model-signing`
write   all of them, beside the model
"""
