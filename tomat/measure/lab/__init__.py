"""The speed lab: training steps measured on the devices that are here, each setting in a process of its own."""
