//! What the life of a connection shows to the program: a span of `tracing` from its beginning to its end, and, with the feature
//! `metrics`, counts by role. Nothing here is called for what a connection carries.

use std::net::SocketAddr;

use rdma_proto::Role;
use tracing::field::Empty;

use crate::error::Error;

/// A connection, from the time it is asked for until it is forgotten.
pub(super) struct Observed {
    span: tracing::Span,
    #[cfg(feature = "metrics")]
    role: &'static str,
    open: bool,
}

impl Observed {
    /// Notes that a connection is asked for, by this side or the peer.
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

    /// Returns the span, for what is logged about the connection.
    pub(super) const fn span(&self) -> &tracing::Span {
        &self.span
    }

    /// Notes that bytes can flow.
    pub(super) fn opened(&mut self) {
        self.open = true;
        tracing::debug!(parent: &self.span, "open");
        #[cfg(feature = "metrics")]
        {
            metrics::counter!("rdma_conn_opened_total", "role" => self.role).increment(1);
            metrics::gauge!("rdma_conn_open", "role" => self.role).increment(1.0);
        }
    }

    /// Notes that the connection is forgotten, and the error that ended it.
    pub(super) fn ended(&self, error: Option<&Error>) {
        if let Some(error) = error {
            self.span.record("error", tracing::field::display(error));
        }
        #[cfg(feature = "metrics")]
        {
            if self.open {
                metrics::gauge!("rdma_conn_open", "role" => self.role).decrement(1.0);
            }
            let total = if error.is_some() { "rdma_conn_failed_total" } else { "rdma_conn_ended_total" };
            metrics::counter!(total, "role" => self.role).increment(1);
        }
        tracing::debug!(parent: &self.span, open = self.open, "ended");
    }
}
