//! The form in which cases are written down.

use super::context::Context;
pub use crate::requirements::{Level, Profile};
pub use suite::{Role, Tag};

/// A case: how the target of one role takes one thing.
pub type Case<'a, B> = suite::Case<Context<'a, B>>;

/// A list of cases, in lines of: who is tested (`server`, `client` or `both`), the id, what the target is shown, what it
/// has to make of it, the requirements, tags, and the body, a `fn(&Context<B>) -> Judged`.
macro_rules! cases {
    ($($who:ident $id:expr, $intent:literal => $expectation:literal,
       [$($requirement:literal),+] $([$($tag:ident),+])?, $body:expr;)+) => {{
        let mut cases = Vec::new();
        $(for role in $crate::blackbox::case::roles(stringify!($who)) {
            let body: fn(&$crate::blackbox::context::Context<'_, B>) -> suite::Judged = $body;
            cases.push(suite::Case {
                id: $id,
                role: Some(*role),
                intent: $intent,
                expectation: $expectation,
                requirements: &[$($requirement),+],
                source: "",
                tags: &[$($(suite::Tag::$tag),+)?],
                run: Box::new(move |context, _| body(context)),
            });
        })+
        cases
    }};
}

/// The roles that a line of `cases!` is for.
pub(super) fn roles(who: &str) -> &'static [Role] {
    match who {
        "server" => &[Role::Server],
        "client" => &[Role::Client],
        _ => &[Role::Server, Role::Client],
    }
}
