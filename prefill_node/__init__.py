"""The prefill node: computes prompts and leases the result out. Its parts are in ``common.node``, mostly ``lend``."""
