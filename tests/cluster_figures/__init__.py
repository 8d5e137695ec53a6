"""Figures of the operator on a real control plane: `make figures SET=cluster`, from a checkout."""
