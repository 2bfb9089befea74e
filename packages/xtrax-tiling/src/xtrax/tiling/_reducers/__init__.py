"""The states of the reducers, for one leaf each."""
