"""Sampling: logits in, one token a sequence out.

`sampler` runs a batch, `processors` change logits (penalties, bias, allowed tokens), `selection` picks a token by
temperature, top-k, top-p and min-p, `grammar` constrains it to structured output.
"""
