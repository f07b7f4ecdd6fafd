"""What lockstep uses of torch that another version may lack, rename or say in other words."""
