"""What every layer speaks: types, parameters, errors, the contracts of stages and families, the graph."""
