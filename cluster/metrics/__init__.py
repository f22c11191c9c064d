"""What there is to see: metrics, logs, traces, what each tenant costs."""
