"""How attention and training scale over several devices: rows (`scaling`), a model of them (`comms_model`), variants."""
