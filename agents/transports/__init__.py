"""Transports that move the bytes of granted transfers."""
