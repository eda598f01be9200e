/* NOCUDA: ends at once. Used to measure the time of an exec. */
int main(void) {
    return 0;
}
