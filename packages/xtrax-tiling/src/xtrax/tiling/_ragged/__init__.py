"""Elements that differ in length: the lengths to pad to, and a program for each."""
