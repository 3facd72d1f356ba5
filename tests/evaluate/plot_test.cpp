// The plot is whole XML, draws every point and its interval, and does not change from run to run.
#include "evaluate/plot.h"

#include <gtest/gtest.h>

#include "core/error.h"

namespace bifocal {
namespace {

std::int64_t count_of(const std::string& text, const std::string& part) {
  std::int64_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

Plot some_plot() {
  return {.title = "a < b & c",
          .x_label = "tokens",
          .y_label = "right",
          .series = {{"one", {{100, 0.5, {0.4, 0.6}}, {3000, 0.25, {0.2, 0.3}}}},
                     {"two", {{100, 0.75, {0.7, 0.8}}, {3000, 0.125, {0.1, 0.2}}}},
                     {"none", {}}}};
}

TEST(Plot, DrawsEverySeries) {
  const std::string svg = plot_svg(some_plot());
  EXPECT_EQ(svg, plot_svg(some_plot()));
  EXPECT_TRUE(svg.starts_with("<svg "));
  EXPECT_TRUE(svg.ends_with("</svg>\n"));
  EXPECT_NE(svg.find("a &lt; b &amp; c"), std::string::npos);
  EXPECT_EQ(count_of(svg, "<polyline "), 2);
  EXPECT_EQ(count_of(svg, "<circle "), 3);                         // two points and the legend
  EXPECT_EQ(count_of(svg, "fill=\"#d55e00\""), 3);                 // the second series' squares
  EXPECT_EQ(count_of(svg, "stroke=\"#0072b2\" stroke-width"), 7);  // bars of three lines, the path
  for (const char* label : {">tokens<", ">right<", ">one<", ">two<", ">128<", ">2048<", ">80 %<"}) {
    EXPECT_NE(svg.find(label), std::string::npos) << label << svg;
  }
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Plot, IsLinearOverAShortSpanAndTakesRatesOfZero) {
  const std::string svg =
      plot_svg({.series = {{"one", {{100, 0.0, {0.0, 0.0}}, {400, 0.0, {0.0, 0.0}}}}}});
  EXPECT_NE(svg.find(">0<"), std::string::npos);
  EXPECT_NE(svg.find(">400<"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

TEST(Plot, RefusesNothing) {
  EXPECT_THROW(plot_svg({}), Error);
  EXPECT_THROW(plot_svg({.series = {{"one", {}}}}), Error);
}

}  // namespace
}  // namespace bifocal
