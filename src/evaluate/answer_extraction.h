// The final answer in a text that reasons, and when two answers are the same.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bifocal {

// Where an answer is looked for. automatic: the last \boxed{}, else the last "#### x", else the
// last number.
enum class Extraction : std::uint8_t { automatic, boxed, hash, number };

// Throws Error naming the known ones: auto, boxed, hash, number.
Extraction extraction_of(std::string_view name);

// Contents of every \boxed{...} and \fbox{...} that is closed, in the order in which they close;
// of nested ones the innermost alone. Escaped braces count as text. Linear in the text.
std::vector<std::string_view> boxed_answers(std::string_view text);

// The x of every "#### x" that is the rest of its line, has no white space and holds a digit.
std::vector<std::string_view> hash_answers(std::string_view text);

// Every number: an optional sign, digits with or without commas between thousands, an optional
// fraction. A minus after a letter, digit or closing bracket is a subtraction. "1,2" are two.
std::vector<std::string_view> numbers(std::string_view text);

// The answer as it stands in the text; nullopt where there is none.
std::optional<std::string_view> extract_answer(std::string_view text, Extraction how);

// Statements of a final answer, in order: all \boxed{}, where there are none all "#### x", and
// where there are none of these either the numbers in "answer is x" and "answer: x".
std::vector<std::string_view> final_statements(std::string_view text);

// One form for equal answers: without white space, dollar signs, LaTeX spacing and font commands,
// degree and percent signs, "x=", a full stop at the end; numbers as canonical_number writes them,
// \frac{a}{b} of integers as a/b. Letters keep their case.
std::string normalize_answer(std::string_view text);

// "-12.5" of "-0,012.50"-like spellings: no plus, no commas, no zeros that mean nothing, no -0.
// nullopt for what is no number. Any length, no rounding.
std::optional<std::string> canonical_number(std::string_view text);

// Whether the text holds the answer: a number equal to it, or, for other answers, the normalised
// answer inside the normalised text with no letter or digit joined to it.
bool holds_answer(std::string_view text, std::string_view normalized_answer);

}  // namespace bifocal
