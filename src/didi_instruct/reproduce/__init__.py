"""The paper's tables and figures again: `didi reproduce`."""
