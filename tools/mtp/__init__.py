"""How the MTP block of the default model is made: the steps of tools/train_mtp.py."""
