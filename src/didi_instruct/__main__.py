"""`python -m didi_instruct` is `didi`; `torchrun -m didi_instruct` runs it in many processes."""

from didi_instruct.cli.main import main

if __name__ == "__main__":
    main()
