"""What can be trained out of the box: one package per recipe, the same file names in each."""
