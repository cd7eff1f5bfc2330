"""The `didi` command: one small file per verb."""
