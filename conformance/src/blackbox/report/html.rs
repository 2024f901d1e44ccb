//! One page with everything in it: several runs side by side, and what each case and requirement says.

use std::collections::BTreeMap;

use serde_json::json;

use crate::blackbox::results::Run;
use crate::reqs::Requirements;

const PAGE: &str = include_str!("page.html");

/// The page.
///
/// # Errors
/// None is known.
pub fn html(runs: &[Run]) -> Result<String, String> {
    let all = Requirements::built_in();
    let requirements: BTreeMap<_, _> = all.iter().map(|one| (one.id.as_str(), one)).collect();
    let scores: Vec<_> = runs.iter().map(|run| run.scores().map(|score| score.to_string())).collect();
    let data = json!({ "runs": runs, "scores": scores, "requirements": requirements });
    // So that no text can end the script that holds it.
    let data = data.to_string().replace('<', "\\u003c");
    Ok(PAGE.replace("\"{{DATA}}\"", &data))
}
