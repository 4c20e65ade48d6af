"""Methods that leave tokens of a prompt behind between layers."""
