"""The event loop around the core: it executes effects and feeds events."""
