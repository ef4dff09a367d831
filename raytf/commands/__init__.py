"""The command `raytf`: each module is one subcommand, imported when it is used."""
