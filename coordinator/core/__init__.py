"""Pure decisions: no sockets, no clock, no log."""
