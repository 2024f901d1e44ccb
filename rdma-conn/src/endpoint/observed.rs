//! Observability of a connection's life: a `tracing` span from start to end and, with the feature
//! `metrics`, counts by role. Nothing here runs per message.

use std::net::SocketAddr;

use rdma_proto::Role;
use tracing::field::Empty;

use crate::error::Error;

pub(super) struct Observed {
    span: tracing::Span,
    #[cfg(feature = "metrics")]
    role: &'static str,
    open: bool,
}

impl Observed {
    pub(super) fn begun(role: Role, peer: SocketAddr) -> Self {
        let role = match role {
            Role::Client => "client",
            Role::Server => "server",
        };
        let span = tracing::info_span!("rdma connection", %peer, role, error = Empty);
        Self {
            span,
            #[cfg(feature = "metrics")]
            role,
            open: false,
        }
    }

    pub(super) const fn span(&self) -> &tracing::Span {
        &self.span
    }

    pub(super) fn opened(&mut self) {
        self.open = true;
        tracing::debug!(parent: &self.span, "open");
        #[cfg(feature = "metrics")]
        {
            metrics::counter!("rdma_conn_opened_total", "role" => self.role).increment(1);
            metrics::gauge!("rdma_conn_open", "role" => self.role).increment(1.0);
        }
    }

    pub(super) fn ended(&self, error: Option<&Error>) {
        if let Some(error) = error {
            self.span.record("error", tracing::field::display(error));
        }
        #[cfg(feature = "metrics")]
        {
            // Only what was opened is in the gauge.
            if self.open {
                metrics::gauge!("rdma_conn_open", "role" => self.role).decrement(1.0);
            }
            let total = if error.is_some() { "rdma_conn_failed_total" } else { "rdma_conn_ended_total" };
            metrics::counter!(total, "role" => self.role).increment(1);
        }
        tracing::debug!(parent: &self.span, open = self.open, "ended");
    }
}
