"""Does one element of a batch touch another? Two traces are followed in lockstep, and what they leave open is tried."""
