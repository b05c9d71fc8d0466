"""The graph of stages: contract, registry, orchestrator."""
