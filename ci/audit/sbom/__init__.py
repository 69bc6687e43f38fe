"""The contents of the software bill of materials: repair writes it, the audit makes it again and compares."""
