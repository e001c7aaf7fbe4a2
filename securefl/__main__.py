"""`python -m securefl`."""

from securefl.cli import main

if __name__ == "__main__":
    main()
