"""What methods are composed of: settings that they share (`groups`), names that become parts (`options`)."""
