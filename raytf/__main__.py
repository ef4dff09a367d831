"""`python -m raytf` is the command `raytf`."""

from raytf.commands.main import main

if __name__ == "__main__":
    main()
