"""Measures how many KV pairs each head needs: the command `kvjax calibrate`."""

from kvjax.cli import calibrate

if __name__ == "__main__":
    calibrate.start()
