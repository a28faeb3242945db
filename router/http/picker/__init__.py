"""An endpoint picker for gateways: it says where a request should go, and watches the answer go by."""
