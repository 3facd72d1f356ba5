// Charts of a run as inline SVG. Colours are classes that the page's style sheet defines, light and
// dark; sizes are those of a small panel that scales with the page.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bifocal {

// Text inside HTML or SVG.
std::string escape_html(std::string_view text);

// "1.2M", "340", "0.0012"; "-" for NaN.
std::string short_number(double value);

struct Curve {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x ascending; NaN leaves a gap
};

struct LineChart {
  std::string title;
  std::string note;  // below, empty: none
  std::vector<Curve> curves;
  std::vector<double> marks;         // x of vertical lines
  std::vector<std::string> x_words;  // labels at x = 0, 1, 2, ...; empty: x is a number
};

// A panel with the chart; empty where no curve has a point. The y axis is logarithmic where all
// values are positive and span more than a factor of 20.
std::string draw(const LineChart& chart);

struct HeatMap {
  std::string title;
  std::string note;
  // Columns at ascending x, each with a value for each row; NaN leaves a cell empty.
  std::vector<std::pair<double, std::vector<double>>> columns;
};

// A panel with rows (layers) upwards and x to the right; empty where there is no value. Columns
// that would be too narrow are averaged. The scale is logarithmic under the same condition.
std::string draw(const HeatMap& map);

}  // namespace bifocal
