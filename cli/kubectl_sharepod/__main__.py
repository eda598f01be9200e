"""`python -m kubectl_sharepod`: runs the plugin without its installed program."""

from kubectl_sharepod.program import main

if __name__ == "__main__":
    main()
