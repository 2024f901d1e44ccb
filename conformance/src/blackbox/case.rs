//! The notation of cases.

use super::context::Context;
pub use crate::requirements::{Level, Profile};
pub use suite::{Role, Tag};

/// A case: the reaction of the target of one role to one behaviour.
pub type Case<'a, B> = suite::Case<Context<'a, B>>;

/// A list of cases: of each, the tested role (`server`, `client` or `both`), the id, the behaviour
/// shown, the required reaction, the requirements, tags, and a `fn(&Context<B>) -> Judged`.
#[macro_export]
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

/// Returns the roles of a line of `cases!`.
pub fn roles(who: &str) -> &'static [Role] {
    match who {
        "server" => &[Role::Server],
        "client" => &[Role::Client],
        _ => &[Role::Server, Role::Client],
    }
}
