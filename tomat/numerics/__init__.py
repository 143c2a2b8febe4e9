"""Whether a change of the configuration leaves what is learnt alone, and what it costs where it does not."""
