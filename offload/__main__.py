"""`python -m offload` is the command `offload`."""

from offload.cli.main import main

if __name__ == "__main__":
    main()
