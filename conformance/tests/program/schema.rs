//! The part of JSON Schema that the schemas in `spec/vectors/schema` use; rejects unknown keywords.

use std::collections::HashMap;

use regex::Regex;
use serde_json::Value;

pub(crate) struct Schema {
    rules: Value,
    /// Its patterns, which take long to compile.
    patterns: HashMap<String, Regex>,
}

impl Schema {
    pub(crate) fn new(rules: Value) -> Self {
        let mut patterns = HashMap::new();
        let mut within = vec![&rules];
        while let Some(value) = within.pop() {
            if let Some(pattern) = value.get("pattern").and_then(Value::as_str) {
                patterns.entry(pattern.to_string()).or_insert_with(|| Regex::new(pattern).unwrap());
            }
            within.extend(value.as_object().into_iter().flat_map(serde_json::Map::values));
            within.extend(value.as_array().into_iter().flatten());
        }
        Self { rules, patterns }
    }

    /// Describes where `value` violates the schema. Each reason begins with the place.
    pub(crate) fn problems(&self, value: &Value) -> Vec<String> {
        let mut problems = Vec::new();
        self.judge(&self.rules, value, "", Some(&mut problems));
        problems
    }

    fn is_met(&self, schema: &Value, value: &Value) -> bool {
        self.judge(schema, value, "", None)
    }

    /// Returns whether `value` matches `schema`. Stops at the first violation without `reasons`.
    fn judge(
        &self,
        schema: &Value,
        value: &Value,
        place: &str,
        mut problems: Option<&mut Vec<String>>,
    ) -> bool {
        let Value::Object(rules) = schema else {
            let may_be_there = schema.as_bool().unwrap_or_else(|| panic!("{schema}"));
            if let Some(problems) = problems.filter(|_| !may_be_there) {
                problems.push(format!("{place}: must not be there"));
            }
            return may_be_there;
        };
        let mut is_met = true;
        for (rule, wanted) in rules {
            if !is_met && problems.is_none() {
                return false;
            }
            let mut judge = |wanted, value, place: &str| {
                is_met &= self.judge(wanted, value, place, problems.as_deref_mut());
            };
            let number = || wanted.as_i64().unwrap();
            let is_as_wanted = match rule.as_str() {
                "$schema" | "$id" | "$defs" | "title" | "default" | "then" | "else" => true,
                "$ref" => {
                    let path = wanted.as_str().and_then(|one| one.strip_prefix('#')).unwrap();
                    judge(self.rules.pointer(path).unwrap(), value, place);
                    true
                }
                "type" => match wanted {
                    Value::Array(types) => types.iter().any(|one| is_a(value, one)),
                    one => is_a(value, one),
                },
                "const" => value == wanted,
                "enum" => wanted.as_array().unwrap().contains(value),
                "not" => !self.is_met(wanted, value),
                "oneOf" => {
                    wanted.as_array().unwrap().iter().filter(|one| self.is_met(one, value)).count() == 1
                }
                "if" => {
                    let next = if self.is_met(wanted, value) { "then" } else { "else" };
                    if let Some(next) = rules.get(next) {
                        judge(next, value, place);
                    }
                    true
                }
                "minimum" => value.as_i64().is_none_or(|one| one >= number()),
                "maximum" => value.as_i64().is_none_or(|one| one <= number()),
                "minLength" => value.as_str().is_none_or(|one| one.chars().count() as i64 >= number()),
                "minItems" => value.as_array().is_none_or(|all| all.len() as i64 >= number()),
                "uniqueItems" => value
                    .as_array()
                    .is_none_or(|all| all.iter().enumerate().all(|(at, one)| !all[..at].contains(one))),
                "pattern" => {
                    let pattern = &self.patterns[wanted.as_str().unwrap()];
                    value.as_str().is_none_or(|one| pattern.is_match(one))
                }
                "items" => {
                    for (at, one) in value.as_array().into_iter().flatten().enumerate() {
                        judge(wanted, one, &format!("{place}/{at}"));
                    }
                    true
                }
                "required" => {
                    let has = |name: &Value| value.get(name.as_str().unwrap()).is_some();
                    !value.is_object() || wanted.as_array().unwrap().iter().all(has)
                }
                "properties" => {
                    for (name, one) in wanted.as_object().unwrap() {
                        if let Some(there) = value.get(name) {
                            judge(one, there, &format!("{place}/{name}"));
                        }
                    }
                    true
                }
                "additionalProperties" => {
                    let known =
                        |name: &String| rules.get("properties").is_some_and(|all| all.get(name).is_some());
                    for (name, one) in
                        value.as_object().into_iter().flatten().filter(|(name, _)| !known(name))
                    {
                        judge(wanted, one, &format!("{place}/{name}"));
                    }
                    true
                }
                other => panic!("{other} is not known here"),
            };
            if !is_as_wanted {
                is_met = false;
                if let Some(problems) = &mut problems {
                    problems.push(format!("{place}: {value} is not as {rule} has it: {wanted}"));
                }
            }
        }
        is_met
    }
}

fn is_a(value: &Value, wanted: &Value) -> bool {
    match wanted.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("{other} is not known here"),
    }
}

#[test]
fn rules_are_kept_to() {
    for (schema, met, broken) in [
        (r#"{"type": ["string", "null"]}"#, "null", "1"),
        (r#"{"const": 1}"#, "1", "2"),
        (r#"{"enum": ["a", 2]}"#, "2", r#""b""#),
        (r#"{"not": {"type": "string"}}"#, "1", r#""b""#),
        (r#"{"oneOf": [{"type": "integer"}, {"minimum": 2}]}"#, "1", "3"),
        (r#"{"if": {"minimum": 5}, "then": {"const": 7}, "else": {"const": 1}}"#, "1", "6"),
        (r#"{"maximum": 4294967295}"#, "4294967295", "4294967296"),
        (r#"{"minLength": 1}"#, r#""x""#, r#""""#),
        (r#"{"minItems": 1}"#, "[1]", "[]"),
        (r#"{"uniqueItems": true}"#, "[1, 2]", "[1, 2, 1]"),
        (r#"{"pattern": "^[a-f]+$"}"#, r#""abc""#, r#""abcg""#),
        (r#"{"items": {"type": "array"}}"#, "[[]]", "[[], 1]"),
        (r#"{"required": ["a"]}"#, r#"{"a": 1, "b": 2}"#, r#"{"b": 2}"#),
        (r#"{"properties": {"a": {"type": "null"}}}"#, r#"{"a": null, "b": 2}"#, r#"{"a": 1}"#),
        (
            r#"{"properties": {"a": true}, "additionalProperties": false}"#,
            r#"{"a": 1}"#,
            r#"{"a": 1, "b": 2}"#,
        ),
        (r##"{"$defs": {"x": {"type": "boolean"}}, "items": {"$ref": "#/$defs/x"}}"##, "[true]", "[0]"),
    ] {
        let parsed = |text| serde_json::from_str(text).unwrap();
        let rules = Schema::new(parsed(schema));
        assert_eq!(rules.problems(&parsed(met)), [""; 0], "{schema}");
        assert_eq!(rules.problems(&parsed(broken)).len(), 1, "{schema}: {broken}");
    }
}
