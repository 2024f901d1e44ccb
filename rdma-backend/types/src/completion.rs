//! Why work requests fail.

use core::fmt;

/// Why a work request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompletionError {
    /// The status.
    pub status: CompletionStatus,
    /// The vendor's code, for logs.
    pub vendor: u32,
}

/// A completion status other than success: `enum ibv_wc_status`. Open, because devices add to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CompletionStatus(pub u32);

macro_rules! statuses {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        impl CompletionStatus {
            $(#[doc = concat!("`IBV_WC_", stringify!($name), "`: ", $text, ".")] pub const $name: Self = Self($value);)*

            /// Returns a short description.
            pub const fn describe(self) -> &'static str {
                match self.0 { $($value => $text,)* _ => "unknown status" }
            }
        }

        impl fmt::Debug for CompletionStatus {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.0 { $($value => f.write_str(stringify!($name)),)* other => write!(f, "CompletionStatus({other})") }
            }
        }
    };
}

statuses! {
    LOC_LEN_ERR = 1, "a message was longer than the receive posted for it";
    LOC_QP_OP_ERR = 2, "the queue pair could not perform the operation";
    LOC_PROT_ERR = 4, "local memory was not registered for the operation";
    WR_FLUSH_ERR = 5, "the device stopped the queue pair, as it does when the peer reaches for memory that it was not given";
    BAD_RESP_ERR = 7, "the peer's device answered something unexpected";
    LOC_ACCESS_ERR = 8, "a write arrived for memory that does not allow it";
    REM_INV_REQ_ERR = 9, "the peer's device found the request invalid";
    REM_ACCESS_ERR = 10, "the peer's device refused access to its memory";
    REM_OP_ERR = 11, "the peer's device failed to perform the operation";
    RETRY_EXC_ERR = 12, "the peer's device no longer acknowledges";
    RNR_RETRY_EXC_ERR = 13, "the peer had no receive posted";
    REM_ABORT_ERR = 16, "the peer's device aborted the operation";
    FATAL_ERR = 19, "the device failed";
    RESP_TIMEOUT_ERR = 20, "the peer's device did not answer in time";
    GENERAL_ERR = 21, "the device reported a general error";
}
